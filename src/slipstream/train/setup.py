"""Build everything a run needs, and refuse what cannot work before anything is written."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from slipstream.data import Batch, Loader, Sampler, ShardSet, has_split, open_shards
from slipstream.data.tokenizers import file_hash
from slipstream.errors import ConfigError, DataError, HardwareError
from slipstream.models import Transformer
from slipstream.parallel import Ranks, wrap
from slipstream.train.config import RunConfig
from slipstream.train.optimizer import AdamW
from slipstream.train.restore import load_trained
from slipstream.train.step import split_size

TOKENIZER = "tokenizer.json"
MAX_RANK_TOKENS = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The token shards of a run."""

    train: ShardSet
    """What is trained on."""
    val: ShardSet | None
    """What is evaluated on, if there is any."""
    tokenizer_file: Path | None
    """The tokenizer that made the shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The moving parts of a run on this rank."""

    model: Transformer
    """The network itself."""
    module: nn.Module
    """What the training step calls: the model, or its data-parallel wrapper."""
    optimizer: AdamW
    """Optimizer over the model's parameters."""


def open_corpus(config: RunConfig) -> Corpus:
    """Open the shards; ConfigError or DataError for a set this model cannot train on."""
    if not config.data.path:
        raise ConfigError("data.path is required: a folder made by slipstream prepare")
    train = open_shards(config.data.path, "train", config.data.verify)
    val = None
    if config.eval.every and has_split(config.data.path, "val"):
        val = open_shards(config.data.path, "val", config.data.verify)
        if val.num_tokens <= config.data.seq_len:
            raise DataError(
                f"{config.data.path}: its validation split has {val.num_tokens} tokens, fewer than "
                f"data.seq_len = {config.data.seq_len} and one; prepare with a larger "
                "--val-fraction, lower data.seq_len, or set eval.every=0"
            )
    if train.vocab_size is not None and train.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the {train.vocab_size} "
            f"tokens of {config.data.path}; set model.vocab_size={train.vocab_size} or more"
        )
    tokenizer = Path(config.data.path) / TOKENIZER
    found = tokenizer if tokenizer.is_file() else None
    if config.train.init_from is not None:
        trained_with = Path(config.train.init_from) / TOKENIZER
        if trained_with.is_file() and train.tokenizer_hash is not None:
            train.require_tokenizer(file_hash(trained_with))
    return Corpus(train=train, val=val, tokenizer_file=found)


def check_vocabulary(config: RunConfig, shards: ShardSet, batch: Batch) -> None:
    """DataError for a token past the model's vocabulary; raw shards do not say what they hold."""
    if shards.vocab_size is not None:
        return
    highest = int(max(batch.tokens_BL.max(), batch.targets_BL.max()))
    if highest >= config.model.vocab_size:
        raise DataError(
            f"{config.data.path}: has token {highest}, model.vocab_size is "
            f"{config.model.vocab_size}; raise model.vocab_size"
        )


def check_batch(config: RunConfig, ranks: Ranks) -> None:
    """ConfigError unless a step's sequences divide over ranks and micro-batches."""
    sequences = config.sequences_per_step
    if sequences % ranks.world:
        raise ConfigError(
            f"train.tokens_per_step = {config.train.tokens_per_step} is {sequences} sequences, "
            f"which {ranks.world} ranks cannot share equally; make it a multiple of "
            f"{ranks.world * config.data.seq_len}"
        )
    split_size(sequences // ranks.world, config.train.micro_batch)
    if config.train.tokens_per_step > MAX_RANK_TOKENS * ranks.world:
        raise ConfigError(
            f"train.tokens_per_step = {config.train.tokens_per_step} is more than "
            f"{MAX_RANK_TOKENS:,} tokens for each of {ranks.world} ranks, whose batch must fit "
            "into the host's memory; lower it or use more ranks"
        )


def make_deterministic(config: RunConfig) -> None:
    """Switch PyTorch to deterministic kernels where the recipe asks for them."""
    if config.train.deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.train.deterministic)


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Dtype of activations on ``device``; HardwareError for bf16 a GPU does not have."""
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if config.train.dtype == "bf16" and not has_bf16:
        raise HardwareError("train.dtype = bf16, which this GPU does not have; use fp32")
    if config.train.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and has_bf16 else torch.float32
    return torch.bfloat16 if config.train.dtype == "bf16" else torch.float32


def build(config: RunConfig, ranks: Ranks, *, resumed: bool) -> Parts:
    """The model on this rank's device, and its optimizer; a resumed one needs no first weights."""
    torch.manual_seed(config.train.seed)
    model = initial_model(config, ranks.device, from_folder=not resumed)
    model.compute_dtype = compute_dtype(config, ranks.device)
    if config.train.compile:
        # The only fp32 products are the router's, and those stay fp32 on purpose.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        for layer in model.layers:
            layer.compile()
    # The weights move here, so before anything holds on to their memory.
    optimizer = AdamW(
        model,
        config.optim,
        weights=_weight_dtype(model, ranks),
        accumulate=0 < config.train.micro_batch < config.sequences_per_step // ranks.world,
    )
    module = wrap(model, ranks, config.parallel.data)
    return Parts(model=model, module=module, optimizer=optimizer)


def _weight_dtype(model: Transformer, ranks: Ranks) -> torch.dtype:
    # DistributedDataParallel would add up the gradients of bf16 weights in bf16.
    if ranks.world > 1 or model.compute_dtype is None:
        return torch.float32
    return model.compute_dtype


def initial_model(
    config: RunConfig, device: torch.device, *, from_folder: bool = True
) -> Transformer:
    """Fresh weights from the seed, or those of ``train.init_from``, in fp32."""
    loss = {"label_smoothing": config.train.label_smoothing, "z_loss": config.train.z_loss}
    if config.train.init_from is None or not from_folder:
        with torch.device(device):
            return Transformer(config.model.plain(), **loss)
    folder, wanted = Path(config.train.init_from), config.model.plain()
    given = load_trained(folder).model
    here, there = wanted.architecture(), given.config.architecture()
    for key in sorted({*here, *there}):
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"model.{key} = {here.get(key)!r}, and {folder} has {there.get(key)!r}; "
                "leave it out to take the folder's"
            )
    with torch.device(device):
        model = Transformer(wanted, **loss)
    model.load_state_dict(given.state_dict())
    return model


def build_loader(config: RunConfig, corpus: Corpus, ranks: Ranks, first_sample: int) -> Loader:
    """This rank's batches from ``first_sample`` on."""
    sampler = Sampler(
        num_tokens=corpus.train.num_tokens,
        seq_len=config.data.seq_len,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
    )
    return Loader(
        corpus.train,
        sampler,
        samples_per_step=config.sequences_per_step,
        rank=ranks.rank,
        world=ranks.world,
        first_sample=first_sample,
        mask_documents=config.data.mask_documents,
        prefetch=config.data.prefetch,
        pin_memory=ranks.device.type == "cuda",
    )
