"""Put the ops into a Hugging Face model and train it, with its weights in flat buckets.

Needs transformers 5. The model is tiny and random and learns the text of this file; with
``AutoModelForCausalLM.from_pretrained`` and your own batches the rest stays as it is.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import slipstream
from slipstream.parallel.flat import FlatAdamW

LENGTH, BATCH, STEPS = 64, 8, 20

text = torch.tensor(list(Path(__file__).read_bytes()))
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    max_position_embeddings=LENGTH,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).to(device).train()

print(slipstream.optimize(model))  # what runs other code now, and what stays and why

optimizer = FlatAdamW(model, lr=1e-2, weight_decay=0.1, max_norm=1.0)
for step in range(STEPS):
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,)).tolist()
    ids_BL = torch.stack([text[start : start + LENGTH] for start in starts]).to(device)
    loss = model(input_ids=ids_BL, labels=ids_BL).loss  # no logits are made
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4 or step == 0:
        print(f"step {step + 1}: {loss.item():.3f} nats per byte")

ours = model(input_ids=ids_BL, labels=ids_BL).loss.item()
slipstream.restore(model)  # the weights trained, the code stock again
stock = model(input_ids=ids_BL, labels=ids_BL).loss.item()
print(f"after step {STEPS}: {ours:.4f} optimized, {stock:.4f} restored")
