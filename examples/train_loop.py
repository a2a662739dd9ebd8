"""Train a small MoE model on this file, with the modules and ops but without the trainer."""

from pathlib import Path

import torch

from slipstream import ModelConfig, Transformer

text = torch.tensor(list(Path(__file__).read_bytes()))
config = ModelConfig(
    vocab_size=256,
    num_layers=2,
    d_model=64,
    moe={"num_experts": 4, "top_k": 2, "d_ff": 64, "normalize": True, "aux_loss": 0.01},
)
torch.manual_seed(0)
model = Transformer(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(60):
    starts = torch.randint(0, len(text) - 65, (8,)).tolist()
    windows = torch.stack([text[start : start + 65] for start in starts])
    output = model(windows[:, :-1], windows[:, 1:])
    loss = output.loss.objective / output.loss.tokens
    (loss + output.router_loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    for moe in model.moe_layers().values():
        moe.end_step()
    if step % 10 == 9:
        print(f"step {step + 1}: {loss.item():.3f} nats per byte")
