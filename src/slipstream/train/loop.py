"""The training loop: steps, evaluation, checkpoints, metrics, and stopping in good order.

``train`` is the whole of ``slipstream train``. Ranks agree on signals and on checkpoints that are
done in a sum the step makes anyway, so none is left waiting.
"""

import math
import signal
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from slipstream.data import Batch
from slipstream.errors import SlipstreamError, TrainingError
from slipstream.hw import describe, peak_memory_bytes, reset_peak_memory
from slipstream.models import size, train_flops_per_token
from slipstream.parallel import Ranks, connect
from slipstream.train import checkpoint
from slipstream.train.checkpoint import Checkpoints, Meta, Saved
from slipstream.train.config import RunConfig
from slipstream.train.console import ProgressView
from slipstream.train.evaluate import Evaluation, evaluate
from slipstream.train.graph import check_graph, check_sites, recorder_for
from slipstream.train.guard import earliest, first_bad_place
from slipstream.train.memory import announcement, deviation, plan_memory
from slipstream.train.metrics import MetricsFile, Record, read_metrics
from slipstream.train.phases import GRAPH_PHASES, PHASES, PhaseTimer
from slipstream.train.run_folder import RunFolder
from slipstream.train.schedule import learning_rate
from slipstream.train.setup import (
    build,
    build_loader,
    check_batch,
    check_vocabulary,
    compute_dtype,
    make_deterministic,
    open_corpus,
)
from slipstream.train.step import StepResult, TrainStep
from slipstream.train.trackers import Tracker, check_trackers, flatten, start_trackers

CHECKED_STEPS = 3
"""After so many steps of a run the peak is one of every step."""


def train(
    config: RunConfig,
    run_dir: Path,
    *,
    resume: bool = False,
    after_step: Callable[[], bool] | None = None,
) -> None:
    """Train as ``config`` says into ``run_dir``; with ``resume`` go on from its last checkpoint.

    Returns after the last step, or after saving a checkpoint on SIGTERM or SIGINT. ``after_step``
    is called after every step; where it returns True, on every rank, the run ends unsaved.
    Raises SlipstreamError for whatever a user can get wrong, before anything is written.
    """
    make_deterministic(config)
    with connect(config.train.device) as ranks, stop_signals() as stopping:
        run = Run(config, RunFolder(run_dir), ranks, resume=resume)
        try:
            run.fit(stopping, after_step)
        finally:
            run.close()


class Run:
    """A run on this rank."""

    def __init__(self, config: RunConfig, folder: RunFolder, ranks: Ranks, *, resume: bool) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks
        folder.check(resume=resume, data=config.data.path)
        check_batch(config, ranks)
        check_graph(config, ranks)
        check_trackers(config.track)
        self.corpus = open_corpus(config)
        saved = folder.latest() if resume else None
        if saved is not None:
            self._check(saved)
        self.parts = build(config, ranks, resumed=saved is not None)
        self.plan = plan_memory(config, self.parts.model, ranks)
        check_sites(config, self.parts.model)
        self.step = 0 if saved is None else saved.meta.step
        self.timer = PhaseTimer(ranks.device, GRAPH_PHASES if config.train.cuda_graph else PHASES)
        self.stepper = TrainStep(
            self.parts.model,
            self.parts.module,
            self.parts.optimizer,
            config.train,
            ranks,
            self.timer,
            recorder_for(config, ranks),
        )
        self.device = describe(ranks.device)
        dtype = str(compute_dtype(config, ranks.device)).removeprefix("torch.")
        self.dtype = dtype.replace("bfloat", "bf").replace("float", "fp")
        self.skipped_in_row = 0
        with ExitStack() as resources:
            self._open(resources, saved, resume=resume)
            self._resources = resources.pop_all()

    def _check(self, saved: Saved) -> None:
        checkpoint.check_model(saved, _model_values(self.config))
        if saved.meta.tokenizer_hash and self.corpus.train.tokenizer_hash:
            self.corpus.train.require_tokenizer(saved.meta.tokenizer_hash)

    def _open(self, resources: ExitStack, saved: Saved | None, *, resume: bool) -> None:
        config, first = self.config, self.ranks.is_first
        changed = self.folder.changed_since(config) if resume else []
        sample = 0 if saved is None else saved.meta.next_sample
        self.loader = build_loader(config, self.corpus, self.ranks, sample)
        resources.callback(self.loader.close)
        self.ranks.barrier()
        self._open_files(resources)
        self.view = ProgressView(
            config.train.steps, self.step, config.train.log_every, enabled=first
        )
        resources.callback(self.view.close)
        self.checkpoints = Checkpoints(
            self.folder.checkpoints,
            self.ranks,
            keep=config.checkpoint.keep,
            background=config.checkpoint.background,
        )
        if self.ranks.world == 1:
            # A run that fails still keeps the checkpoint it was writing; ranks that fail apart
            # cannot agree on one.
            resources.callback(self.checkpoints.wait)
        self._announce(changed)
        if saved is not None:
            self._restore(saved)
        elif resume:
            self.view.say(f"no checkpoint in {self.folder.path}: starting at step 0")

    def _open_files(self, resources: ExitStack) -> None:
        self.metrics: MetricsFile | None = None
        self.trackers: list[Tracker] = []
        problem: SlipstreamError | None = None
        if self.ranks.is_first:
            try:
                self._open_on_first(resources)
            except SlipstreamError as error:
                problem = error
        # Rank 0 alone writes; where it cannot, the others must hear of it instead of waiting.
        problem = self.ranks.from_first(problem)
        if problem is not None:
            raise problem

    def _open_on_first(self, resources: ExitStack) -> None:
        self.folder.lock()
        resources.callback(self.folder.unlock)
        if self.step < self.config.train.steps:
            self.folder.start(self.config, self.corpus.tokenizer_file)
        self.metrics = MetricsFile(self.folder.metrics, keep_up_to=self.step)
        resources.callback(self.metrics.close)
        values = self.config.model_dump(mode="json")
        self.trackers = start_trackers(self.config.track, self.folder.path, values, self.step)
        for tracker in self.trackers:
            resources.callback(tracker.finish)

    def _announce(self, changed: list[str]) -> None:
        count = size(self.config.model)
        spec = self.device.spec
        peak = f"peak {spec.peak_flops(self.dtype) / 1e12:.0f} TFLOP/s" if spec else "peak unknown"
        self.view.say(
            f"{count.total / 1e6:,.1f}M parameters ({count.active / 1e6:,.1f}M active), "
            f"{self.config.train.tokens_per_step:,} tokens a step, {self.ranks.world} x "
            f"{self.device.name}, {self.dtype}, {peak}"
        )
        self.view.say(
            f"{self.corpus.train.num_tokens:,} training tokens; run folder {self.folder.path}"
        )
        if self.config.eval.every and self.corpus.val is None:
            self.view.say("no validation split in data.path: evaluation is off")
        for line in announcement(self.plan) if self.plan is not None else []:
            self.view.say(line)
        for line in changed:
            self.view.say(f"changed since the run began: {line}")

    def _restore(self, saved: Saved) -> None:
        state, here = self._state(), self.ranks
        key = f"rank{here.rank}"
        known = checkpoint.has_rng(saved, here.rank, here.device)
        whole = saved.meta.world == here.world and all(here.gather(known))
        if not whole:
            del state["rng"]
        checkpoint.load(saved, state, here)
        self.parts.optimizer.follow_masters()
        if whole:
            checkpoint.set_rng_state(state["rng"][key], here.device)
        self.view.say(f"resumed from {saved.path.name}")
        if not whole:
            self.view.say(
                f"the checkpoint is of {saved.meta.world} ranks, this run has {here.world} on "
                f"{here.device.type}: random states start anew, data goes on where it was"
            )
        seen = self.corpus.train
        for line in checkpoint.check_data(
            saved,
            num_tokens=seen.num_tokens,
            data_hash=seen.content_hash,
            seq_len=self.config.data.seq_len,
            seed=self.config.train.seed,
        ):
            self.view.say(f"the data is not what the run began with: {line}")

    def fit(self, stopping: list[str], after_step: Callable[[], bool] | None = None) -> None:
        """Run to the last step or until asked to stop."""
        steps = self.config.train.steps
        if self._evaluation_is_owed():
            self._evaluate(stopping)
        if self.step >= steps:
            self.view.say(f"already at step {self.step} of {steps}: nothing to do")
        reset_peak_memory(self.ranks.device)
        begin = self.step
        while self.step < steps:
            batch, result = self._one_step(bool(stopping))
            if self.step == begin + CHECKED_STEPS:
                self._check_memory()
            self.checkpoints.poll(result.written)
            self._guard(batch, result)
            self.parts.optimizer.zero_grad()
            if after_step is not None and after_step():
                break
            stop, evaluation = result.stop, None
            if self._due(self.config.eval.every) and not stop:
                evaluation = self._evaluate(stopping)
                stop = self.ranks.world == 1 and bool(stopping)
            if stop or self.step == steps or self._due(self.config.checkpoint.every):
                self._save(evaluation)
            if stop:
                self.view.say(f"asked to stop: saved step {self.step}, continue with --resume")
                break
        self.checkpoints.wait()

    def _check_memory(self) -> None:
        measured = peak_memory_bytes(self.ranks.device) / 2**30
        line = deviation(self.plan, measured, self.ranks.device)
        if line is not None:
            self.view.say(line)

    def _evaluation_is_owed(self) -> bool:
        # A run that was stopped on a step due for evaluation saved first and left this for later.
        if self.step == 0 or not self._due(self.config.eval.every):
            return False
        done = self.metrics is not None and any(
            record["step"] == self.step and "val_loss" in record
            for record in read_metrics(self.folder.metrics)
        )
        return not self.ranks.from_first(done)

    def _one_step(self, stop: bool) -> tuple[Batch, StepResult]:
        begin = time.perf_counter()
        with self.timer("data", host=True), record_function("## load_batch ##"):
            batch = next(self.loader)
        check_vocabulary(self.config, self.corpus.train, batch)
        lr = learning_rate(self.config.optim, self.step, self.config.train.steps)
        written = self.checkpoints.is_written()
        result = self.stepper.run(batch, lr, stop=stop, written=written)
        self.step += 1
        self._log(self._record(result, lr, time.perf_counter() - begin))
        return batch, result

    def _record(self, result: StepResult, lr: float, seconds: float) -> Record:
        rate = self.config.train.tokens_per_step / seconds
        flops = train_flops_per_token(self.config.model, self.config.data.seq_len)
        per_device = flops * rate / self.ranks.world
        spec = self.device.spec
        clock: Record = {
            "step_ms": round(1e3 * seconds, 3),
            **{f"{name}_ms": round(ms, 3) for name, ms in self.timer.take().items()},
            "tok_per_s": round(rate, 1),
            "tflops_per_device": round(per_device / 1e12, 4),
            "mfu": round(per_device / spec.peak_flops(self.dtype), 4) if spec else None,
            "peak_gib": round(peak_memory_bytes(self.ranks.device) / 2**30, 3),
        }
        if self.plan is not None and self.plan.predicted_gib is not None:
            clock["predicted_gib"] = round(self.plan.predicted_gib, 3)
        record: Record = {
            "step": self.step,
            "tokens": self.step * self.config.train.tokens_per_step,
            "loss": _finite(result.loss),
            "grad_norm": _finite(result.grad_norm),
            "lr": lr,
            "skipped": result.skipped,
        }
        if self.config.train.z_loss:
            record["z_loss"] = _finite(result.z_loss)
        if result.load is not None:
            record["router_loss"] = _finite(result.router_loss)
            record["moe"] = asdict(result.load)
        return record | {"time": clock}

    def _log(self, record: Record) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
        for tracker in self.trackers:
            tracker.log(flatten(record), record["step"])
        if "val_loss" not in record:
            self.view.step(record)

    def _guard(self, batch: Batch, result: StepResult) -> None:
        if not result.skipped:
            self.skipped_in_row = 0
            return
        self.skipped_in_row += 1
        place = first_bad_place(
            self.parts.model, batch, self.config.train.micro_batch, self.ranks.device
        )
        where = earliest(self.ranks.gather(place))
        self.view.say(f"step {self.step} skipped: first non-finite value in the {where}")
        limit = self.config.train.max_skipped
        if self.skipped_in_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row were not finite (train.max_skipped = {limit}), first in "
                f"the {where}; lower optim.lr, or look at the data of step {self.step}"
            )

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.config.train.steps)

    def _evaluate(self, stopping: list[str]) -> Evaluation | None:
        if self.corpus.val is None:
            return None
        begin = time.perf_counter()
        found = evaluate(self.parts.model, self.corpus.val, self.ranks, self.config, stopping)
        if found is None:
            return None
        per_byte = found.nats_per_byte
        self._log(
            {
                "step": self.step,
                "val_loss": _finite(found.loss),
                "val_nats_per_byte": per_byte if per_byte is None else _finite(per_byte),
                "val_tokens": found.tokens,
                "time": {"eval_ms": round(1e3 * (time.perf_counter() - begin), 3)},
            }
        )
        extra = "" if per_byte is None else f" ({per_byte:.4f} nats per byte)"
        self.view.say(f"step {self.step}  validation loss {found.loss:.4f}{extra}")
        return found

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.parts.optimizer.exact(self.parts.model.state_dict()),
            "optim": self.parts.optimizer.state,
            "rng": {f"rank{self.ranks.rank}": checkpoint.rng_state(self.ranks.device)},
        }

    def _save(self, evaluation: Evaluation | None) -> None:
        finite = evaluation is not None and math.isfinite(evaluation.loss)
        meta = Meta(
            step=self.step,
            next_sample=self.loader.next_sample,
            model=_model_values(self.config),
            world=self.ranks.world,
            tokenizer_hash=self.corpus.train.tokenizer_hash,
            num_tokens=self.corpus.train.num_tokens,
            data_hash=self.corpus.train.content_hash,
            seq_len=self.config.data.seq_len,
            seed=self.config.train.seed,
            val_loss=evaluation.loss if evaluation is not None and finite else None,
        )
        self.checkpoints.save(self._state(), meta)

    def close(self) -> None:
        """Stop threads and close files, after a finished run or a failed one."""
        self._resources.close()


@contextmanager
def stop_signals() -> Generator[list[str]]:
    """Within the block SIGTERM and SIGINT are noted in the list; a second one interrupts."""
    received: list[str] = []

    def note(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    # A shell that starts a job in the background has it ignore Ctrl-C, which then is not for it.
    heeded = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _model_values(config: RunConfig) -> dict[str, Any]:
    return config.model.plain().model_dump(mode="json")


def _finite(value: float) -> float | None:
    # JSON has no NaN.
    return value if math.isfinite(value) else None
