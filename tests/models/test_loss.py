"""Label smoothing is part of the objective, not of what an evaluation reports."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.models import ModelConfig, Transformer


@pytest.mark.parametrize("values", [{}, {"tie_embeddings": True}, {"logit_softcap": 2.0}])
def test_smoothing_only_while_training(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 37, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 12}
    config = ModelConfig.model_validate({**shape, "init_std": 0.3, **values})
    model = Transformer(config, label_smoothing=0.3)
    tokens, targets = torch.randint(0, 37, (2, 2, 9))
    targets[0, :3] = -100
    logits = model(tokens).logits.flatten(0, 1)
    losses = {
        smoothing: F.cross_entropy(
            logits, targets.flatten(), reduction="sum", label_smoothing=smoothing
        ).item()
        for smoothing in (0.0, 0.3)
    }
    assert losses[0.3] != pytest.approx(losses[0.0], rel=1e-4)
    for training, smoothing in ((True, 0.3), (False, 0.0), (True, 0.3)):
        loss = model.train(training)(tokens, targets).loss
        assert loss.nll.item() == pytest.approx(losses[smoothing], rel=1e-5)
        assert loss.tokens.item() == 15
