"""Train a byte-level BPE tokenizer with the ``tokenizers`` library."""

from collections.abc import Iterable

from slipstream.data.optional import require
from slipstream.errors import ConfigError

SMALLEST_VOCAB = 257


def parse_vocab(spec: str) -> int:
    """VOCAB of ``train:VOCAB``; ConfigError if it is no number or below 257."""
    text = spec.removeprefix("train:")
    if not text.isdecimal():
        raise ConfigError(f"--tokenizer {spec}: VOCAB must be a whole number, as in train:8192")
    if int(text) < SMALLEST_VOCAB:
        raise ConfigError(
            f"--tokenizer {spec}: VOCAB must be at least {SMALLEST_VOCAB} (256 bytes and one end "
            "token), and more to learn any merge, as in train:8192"
        )
    return int(text)


def train_bpe(vocab_size: int, texts: Iterable[str], end_token: str) -> str:
    """The ``tokenizer.json`` of a BPE over bytes with at most ``vocab_size`` ids.

    Text is cut into words first as in GPT-2, so no merge crosses a word boundary. Little text gives
    fewer ids.
    """
    library = require("tokenizers", "training a tokenizer")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()
