"""The verbs as a user types them."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from slipstream import verify
from slipstream.bench import moe_peers, moe_problem, ops_list, ops_peers, step_arms, step_model
from slipstream.cli import VERBS, bench_names
from slipstream.cli.bench_options import dtype_of
from slipstream.ops.moe.experts import tuned
from slipstream.train.metrics import read_metrics
from tests.train.runs import ROOT, environment, slipstream


@pytest.mark.parametrize("verb", [[], ["diagnose"]], ids=["all", "diagnose"])
def test_help_answers_within_half_a_second_and_without_torch(verb: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "slipstream", *verb, "--help"]
    seconds = []
    for _ in range(5):
        before = os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = os.times()
        # Of the processor: what else the machine does is not the command's time.
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
        assert not re.search(r"\| +(torch|numpy)$", done.stderr, re.MULTILINE)
    assert min(seconds) < 0.5


SUBCOMMANDS = {
    "bench": ("moe", "ops", "step", "table"),
    "tune": ("moe",),
    "config": ("show", "schema"),
}
COMMANDS = [
    *((verb,) for verb in VERBS),
    *((verb, name) for verb, names in SUBCOMMANDS.items() for name in names),
]
WRONG = [
    *((*command, "--no-such-option") for command in COMMANDS),
    ("bench", "no-such-command"),
    ("bench", "moe", "--dtype", "fp7"),
    ("bench", "moe", "--skew", "-1"),
    ("bench", "ops", "--device", "tpu"),
    ("bench", "step", "--device", "tpu"),
    ("bench", "step", "--steps", "0"),
    ("tune", "moe", "--dtype", "fp7"),
    ("verify", "--json", "no/such/folder/file.json"),
    ("sample", "run", "--checkpoint", "oldest"),
    ("env", "--dtype", "fp7"),
]


def test_the_subcommands_are_all_that_there_are() -> None:
    for verb, (module, _) in VERBS.items():
        app = importlib.import_module(f"slipstream.cli.{module}").app
        command = typer.main.get_command(app)
        assert set(getattr(command, "commands", ())) == set(SUBCOMMANDS.get(verb, ())), verb


@pytest.mark.parametrize(
    "arguments", [*((*command, "--help") for command in COMMANDS), *WRONG], ids=" ".join
)
def test_help_and_wrong_arguments_are_answered_without_torch(arguments: tuple[str, ...]) -> None:
    # A second or more of imports by itself; numpy and rich are far less.
    command = [sys.executable, "-X", "importtime", "-m", "slipstream", *arguments]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = os.times()
    assert done.returncode == (0 if arguments[-1] == "--help" else 2), done.stderr
    assert not re.search(r"\| +(torch|triton|transformers)$", done.stderr, re.MULTILINE)
    assert sum(after[2:4]) - sum(before[2:4]) < 2


def test_the_choices_in_help_are_those_of_the_benches() -> None:
    assert set(moe_problem.SHAPES) == {
        name + end for name in bench_names.MOE_SHAPES for end in ("", "-short")
    }
    assert tuple(moe_peers.PEERS) == bench_names.MOE_PEERS
    assert tuple(ops_list.OPS) == bench_names.OPS
    assert ops_peers.PEERS == bench_names.OPS_PEERS
    assert step_arms.ARMS == bench_names.STEP_ARMS
    assert tuple(step_model.SIZES) == bench_names.STEP_SIZES
    assert tuple(verify.DTYPES) == bench_names.DTYPES
    assert tuned.ENVIRONMENT == bench_names.TUNED_VARIABLE
    for name in bench_names.DTYPES:
        assert dtype_of(name) is verify.DTYPES[name]


def test_help_lists_every_verb() -> None:
    done = slipstream("--help")
    for verb, (_, text) in VERBS.items():
        assert re.search(rf"{verb}\s+{re.escape(text.split()[0])}", done.stdout), verb


@pytest.mark.parametrize("verb", VERBS)
def test_the_verb_table_says_what_the_verb_says(verb: str) -> None:
    module, text = VERBS[verb]
    source = (ROOT / "src" / "slipstream" / "cli" / f"{module}.py").read_text()
    apps = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "app"
    ]
    helps = [k.value for k in apps[0].keywords if k.arg == "help"]
    assert [ast.literal_eval(value) for value in helps] == [text]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    done = slipstream(verb, "--help")
    assert done.returncode == 0
    assert re.search(rf"Usage: .* {verb} ", done.stdout)


def test_an_unknown_verb_is_refused() -> None:
    done = slipstream("tarin")
    assert done.returncode == 2
    assert "tarin" in done.stderr


def test_importing_the_package_loads_no_torch_and_writes_no_environment() -> None:
    code = "import os, sys; b = dict(os.environ); import slipstream; "
    code += "print('torch' in sys.modules, b == dict(os.environ), slipstream.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["False", "True"]


def test_a_diagnosis_is_made_and_shown_without_torch() -> None:
    code = "import sys, slipstream.diagnose, slipstream.report.diagnosis, slipstream.hw; "
    code += "print('torch' in sys.modules, 'slipstream.train' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", ["slipstream", "slipstream.hw", "slipstream.report"])
def test_public_names_resolve(name: str) -> None:
    code = f"import {name} as s; print(all(getattr(s, n) is not None for n in s.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["slipstream", "slipstream.hw", "slipstream.report"])
def test_a_name_that_is_not_public_is_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'speed'"):
        _ = importlib.import_module(name).speed


def test_env_says_what_runs_and_why() -> None:
    done = slipstream("env", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert re.search(r"moe_experts\s+grouped_mm", done.stdout)
    reason = r"not triton: the kernels do not run on a cpu device"
    assert re.search(rf"^  norm\s+reference\s+{reason}$", done.stdout, re.MULTILINE)
    assert "verdict: " in done.stdout
    assert len(done.stdout.splitlines()) < 40


def test_config_show_and_schema() -> None:
    recipe = str(ROOT / "recipes" / "quickstart.toml")
    shown = slipstream("config", "show", recipe, "optim.lr=0.5", "--diff")
    assert shown.returncode == 0, shown.stderr
    assert "lr = 0.5" in shown.stdout
    assert "beta1" not in shown.stdout
    whole = slipstream("config", "show", recipe)
    assert "beta1 = 0.9" in whole.stdout
    schema = slipstream("config", "schema")
    properties = json.loads(schema.stdout)["properties"]
    assert {"model", "data", "train", "optim", "eval", "checkpoint"} <= set(properties)


def test_the_committed_schema_is_the_current_one() -> None:
    committed = (ROOT / "recipes" / "schema.json").read_text()
    assert committed == slipstream("config", "schema").stdout, (
        "run: slipstream config schema > recipes/schema.json"
    )


def test_a_run_folder_holds_what_it_should(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "tokenizer.json", "events"} <= names
    records = read_metrics(run / "metrics.jsonl")
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 13))
    clock = steps[-1]["time"]
    phases = clock["data_ms"] + clock["forward_ms"] + clock["backward_ms"] + clock["optimizer_ms"]
    assert 0.5 * clock["step_ms"] < phases <= 1.01 * clock["step_ms"]
    assert clock["mfu"] is None, "no MFU where the peak is unknown"
    assert clock["tok_per_s"] == pytest.approx(256e3 / clock["step_ms"], rel=1e-2)
    assert set(steps[-1]["moe"]) == {"max_over_mean", "entropy", "unused", "rerouted"}
    evaluations = [r for r in records if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [4, 8, 12]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.0, "it learns"


def test_plain_lines_without_a_terminal(corpus: Path, tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes" / "ci" / "dense.toml")
    done = slipstream("train", recipe, f"data.path={corpus}", "--run-dir", str(tmp_path / "r"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [re.match(r"step (\d+)", line).group(1) for line in lines] == [
        "1", "4", "6", "8", "12", "12",
    ]  # fmt: skip
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert done.stderr == ""


def test_sample_continues_the_prompt_and_repeats_with_its_seed(run: Path) -> None:
    command = ("sample", str(run), "--prompt", "def ", "--tokens", "20")
    first, again = slipstream(*command), slipstream(*command)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("def ")
    assert first.stdout == again.stdout
    other = slipstream(*command, "--seed", "1")
    assert other.stdout != first.stdout


def test_report_has_the_numbers_and_draws_the_loss(run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "loss.svg"
    done = slipstream("report", str(run), "--figure", str(picture))
    assert done.returncode == 0, done.stderr
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert f"{last['val_nats_per_byte']:.4f} nats per byte" in done.stdout
    assert "tokens/s" in done.stdout
    svg = picture.read_text()
    assert svg.startswith("<?xml")
    assert "validation" in svg


def test_module_and_script_are_one_command() -> None:
    script = Path(sys.executable).with_name("slipstream")
    assert script.exists()
    done = subprocess.run(
        [script, "config", "show", os.fspath(ROOT / "recipes" / "quickstart.toml")],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "[model]" in done.stdout
