"""The ``--peers`` option: names out of those there are."""

from collections.abc import Collection

from slipstream.errors import ConfigError


def chosen_names(names: str, known: Collection[str]) -> list[str]:
    """Names of a comma-separated list; ``all``, and ``-name`` takes one away. ConfigError."""
    chosen: list[str] = []
    for word in (part.strip() for part in names.split(",")):
        name = word.removeprefix("-")
        if name != "all" and name not in known:
            raise ConfigError(f"--peers {word}: there are all, {', '.join(known)}")
        if word.startswith("-"):
            chosen = [n for n in chosen if n != name]
        else:
            chosen += [n for n in (known if name == "all" else [name]) if n not in chosen]
    if not chosen:
        raise ConfigError(f"--peers {names}: nothing left to measure; name at least one peer")
    return chosen
