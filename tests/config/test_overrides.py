"""What is typed on the command line: nothing is dropped, text stays text, errors name it."""

from pathlib import Path

import pytest

from slipstream.config import load, parse_overrides
from slipstream.config.load import keys_of
from slipstream.errors import ConfigError
from slipstream.train.config import RunConfig, load_run_config

TEXT_KEYS = ["model.preset", "data.path", "train.init_from", "track.project"]
NOT_ONE_VALUE = [
    "3\nfoo=1",
    "3\n[train]",
    "3\n[optim]\nlr=1",
    "3 # three",
    "3,",
    "3, 4",
    "3]\nvalue=[4",
    "3\n# three",
    "[1] # one",
    "true\nfalse",
]


@pytest.mark.parametrize("text", NOT_ONE_VALUE)
def test_what_is_no_single_value_is_kept_whole_as_text(text: str) -> None:
    assert parse_overrides([f"train.steps={text}"]) == {"train": {"steps": text}}
    with pytest.raises(ConfigError, match=r"train\.steps = .*must be a whole number"):
        load(RunConfig, None, [f"train.steps={text}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        (" 3 \n", 3),
        ("[1,\n2]", [1, 2]),
        ("[]", []),
        ("{a = 1}", {"a": 1}),
        ("'a # b'", "a # b"),
        ('"""a\nb"""', "a\nb"),
        ("inf", float("inf")),
        ("", ""),
        ("a=b", "a=b"),
        ("9" * 5000, "9" * 5000),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_single_value_is_read_as_toml(text: str, value: object) -> None:
    assert parse_overrides([f"a={text}"]) == {"a": value}


def test_every_key_of_text_is_known() -> None:
    found = [key for key, kind in keys_of(RunConfig).items() if kind in (str, str | None)]
    assert sorted(found) == sorted(TEXT_KEYS)


@pytest.mark.parametrize("text", ["123", "1.50", "1e3", "true", "2024-01-02", "inf", "0x10"])
@pytest.mark.parametrize("key", TEXT_KEYS)
def test_a_key_of_text_keeps_what_was_typed(key: str, text: str) -> None:
    section, _, leaf = key.partition(".")
    values = parse_overrides([f"{key}={text}"], keys_of(RunConfig))
    assert values == {section: {leaf: text}}
    if section != "model":
        assert getattr(getattr(load(RunConfig, None, [f"{key}={text}"]), section), leaf) == text
    with pytest.raises(ConfigError, match=r"must be text|preset .* does not exist"):
        load(RunConfig, None, [f"{key}=[{text}]"])


def test_a_number_for_text_in_a_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[data]\npath = 123\n")
    with pytest.raises(ConfigError, match=r"recipe\.toml: data\.path = 123: must be text"):
        load(RunConfig, path)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", ["train.steps=0"], r"^override: train\.steps = 0: must be greater than 0$"),
        ("", ["train=3"], r"^override: train = 3: must be a table of keys$"),
        ("", ["track.to=[1]"], r"^override: track\.to\.0 = 1: must be 'tensorboard'"),
        ("[train]\nsteps = 0\n", ["train.seed=1"], r"^RECIPE: train\.steps = 0: must be greater"),
        (
            "[train]\nsteps = 0\n",
            ["train.seed=-1"],
            r"^RECIPE: train\.steps = 0: .*; override: train\.seed = -1: .* equal to 0$",
        ),
        (
            "",
            ["model.num_heads=3", "train.steps=5"],
            r"^RECIPE with model\.num_heads=3: model: d_model = 256 is not divisible",
        ),
        (
            "",
            ["model.num_layers=1", "data.seq_len=4096", "train.steps=5"],
            r"^RECIPE with data\.seq_len=4096: recipe: data\.seq_len = 4096 exceeds",
        ),
        (
            "",
            ["data.seq_len=1000"],
            r"^RECIPE with data\.seq_len=1000: recipe: train\.tokens_per_step = 32768 is not",
        ),
        ("", ["model.preset=xyz"], r"^RECIPE with model\.preset=xyz: model: preset 'xyz' does"),
        ("[model]\npreset = 'xyz'", ["train.steps=5"], r"^RECIPE: model: preset 'xyz' does not"),
    ],
)
def test_an_error_names_where_the_value_came_from(
    text: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    for loader in (
        lambda: load(RunConfig, path, overrides),
        lambda: load_run_config(path, overrides),
    ):
        with pytest.raises(ConfigError, match=message.replace("RECIPE", str(path))):
            loader()


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("train.steps=x", "a whole number"),
        ("train.steps=1.5", "a whole number"),
        ("train.steps=[1]", "a whole number"),
        ("optim.lr=x", "a number"),
        ("optim.lr=[1]", "a number"),
        ("train.compile=maybe", "true or false"),
        ("train.compile=[1]", "true or false"),
        ("track.to=3", r'a list, as in \["a", "b"\]'),
        ("optim=3", "a table of keys"),
        ("model.moe=3", "a table of keys"),
        ("train.dtype=fp8", "'auto', 'bf16' or 'fp32'"),
        ("optim.lr=nan", "a finite number"),
    ],
)
def test_errors_say_what_is_allowed(override: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"must be {allowed}") as caught:
        load(RunConfig, None, [override])
    assert "Input should" not in str(caught.value)


@pytest.mark.parametrize("given", ["3", "[1]", "1.5", "true", "''", "{a = 1}"])
def test_a_preset_that_is_no_name_is_one_config_error(given: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"[model]\npreset = {given}\n")
    for args in ((path, []), (None, [f"model.preset={given}"])):
        if args[0] is None and given == "{a = 1}":
            continue
        with pytest.raises(ConfigError, match=r"model: preset .* does not exist; presets are"):
            load(RunConfig, *args)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_part_of_a_recipe(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[data]\npath = 'caf\u00e9'\n", encoding=encoding)
    assert load(RunConfig, path).data.path == "caf\u00e9"
