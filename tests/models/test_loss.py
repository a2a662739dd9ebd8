"""Label smoothing and the z loss are parts of the objective, not of what an evaluation reports."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.models import ModelConfig, Transformer
from slipstream.train.config import RunConfig
from slipstream.train.setup import initial_model


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


@pytest.mark.parametrize("z_loss", [0.0, 0.5])
def test_the_objective_is_differentiable_and_adds_the_z_loss(z_loss: float) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 37, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 12}
    model = Transformer(ModelConfig.model_validate({**shape, "init_std": 0.3}), z_loss=z_loss)
    tokens, targets = torch.randint(0, 37, (2, 2, 9))
    targets[0, :3] = -100
    loss = model(tokens, targets).loss
    logits = model(tokens).logits.flatten(0, 1)
    kept = targets.flatten() != -100
    nll = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    z = logits.logsumexp(-1).square()[kept].sum()
    assert loss.nll.item() == pytest.approx(nll.item(), rel=1e-5)
    assert loss.z.item() == pytest.approx(z.item(), rel=1e-5)
    assert loss.objective.item() == pytest.approx((nll + z_loss * z).item(), rel=1e-5)
    assert [value.requires_grad for value in loss] == [True, False, False, False]
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss.objective, parameters)
    expected = torch.autograd.grad(nll + z_loss * z, parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_run_trains_with_the_losses_it_is_configured_with() -> None:
    model = {"vocab_size": 37, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 12}
    losses = {"z_loss": 1e-3, "label_smoothing": 0.1}
    config = RunConfig.model_validate({"model": model, "train": losses})
    built = initial_model(config, torch.device("cpu")).token_loss
    assert (built.z_loss, built.label_smoothing) == (1e-3, 0.1)
