"""The reference of all findings: what each means, how it is computed, why so, and what to do.

The findings, the reports and docs/findings.md read it here. ``slipstream`` names switches of this
version only, and is None where there is none.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What there is to say about one kind of finding."""

    title: str
    """In a few words."""
    meaning: str
    """What it means for the job."""
    computed: str
    """How its milliseconds are computed, with the thresholds and why they are what they are."""
    slipstream: str | None
    """The switch of this version."""
    pytorch: str
    """What to do in any PyTorch program."""


HINTS = {
    "straggler": Hint(
        title="a slow rank",
        meaning="Ranks reach collectives at different times and wait for the last one. The time "
        "looks like communication and is not: neither a faster network nor more overlap helps.",
        computed="Collectives are matched over ranks and their ends checked. Before the last rank "
        "starts a collective the others wait; the milliseconds are that waiting, as far as no "
        "kernel runs beside it, on the rank that waits most. The slow rank is the one that "
        "causes at least half of the waiting and twice as much as any other; with none, the work "
        "varies from rank to rank and the confidence is medium.",
        slipstream="slipstream prepare and data.path: Slipstream's loader gives every rank the "
        "same number of tokens",
        pytorch="Even out the work before the collective: the same number of tokens on every rank, "
        "batches sorted or packed by length, balanced experts and embedding tables. If the "
        "slow rank is always the same, look at its data loading, its clocks (nvidia-smi -q -d "
        "PERFORMANCE) and what else runs on that machine.",
    ),
    "exposed-communication": Hint(
        title="exposed communication",
        meaning="The device runs collectives and nothing else.",
        computed="Time in which a communication kernel runs and no other kernel does; copies hide "
        "nothing. Waiting for a slow rank is taken off where ranks can be matched.",
        slipstream="parallel.data.bucket_mb sets the size of the gradient buckets that are reduced "
        "inside backward; a larger train.tokens_per_step reduces gradients less often",
        pytorch="Start communication earlier and give it work to run beside: DDP with "
        "bucket_cap_mb tuned and gradient_as_bucket_view=True, no_sync() while accumulating, FSDP2 "
        "with prefetching (set_modules_to_forward_prefetch), async_op=True with a late wait(). "
        "Send less: bf16 gradients (bf16_compress_hook), larger batches.",
    ),
    "exposed-copies": Hint(
        title="exposed copies",
        meaning="The device copies memory and runs no kernel meanwhile.",
        computed="Time in which a copy or memory set runs and no kernel does, by direction. A copy "
        "from pageable memory also blocks the host.",
        slipstream="data.prefetch: Slipstream's loader builds batches in pinned memory ahead of "
        "the step and copies them without blocking",
        pytorch="Host to device: DataLoader(pin_memory=True) and .to(device, non_blocking=True), "
        "on a side stream one step ahead. Device to device: look for clone(), contiguous(), "
        "torch.cat and slices written back; allocate once and write in place, or let "
        "torch.compile remove them. Device to host: copy once per step, not per value.",
    ),
    "launch-bound": Hint(
        title="launch-bound",
        meaning="Kernels are so short that the host cannot launch them fast enough, and the device "
        "waits for launches. Faster kernels bring nothing.",
        computed="A replay of the trace in which issuing work costs the host nothing, less what "
        "removing synchronisations and other causes would bring by themselves. Called "
        "launch-bound if at least half of the kernels are shorter than 10 us (a launch costs the "
        "host 3 to 10 us) and the median gap is longer than the median kernel; host-bound "
        "otherwise.",
        slipstream="train.compile=true; a larger train.micro_batch",
        pytorch='Fewer, larger kernels: torch.compile(mode="reduce-overhead") or CUDA graphs '
        "(torch.cuda.make_graphed_callables), a larger batch, AdamW(fused=True), torch._foreach_* "
        "in place of loops over parameters.",
    ),
    "host-bound": Hint(
        title="host-bound",
        meaning="The device waits while the host prepares the next launch: Python, operators and "
        "their bookkeeping. Faster kernels and more overlap bring nothing until the host is ahead.",
        computed="As launch-bound, where most kernels are long enough to hide a launch. Of medium "
        "confidence at most: this is what no specific cause explains, and unlike launches, Python "
        "and operators cannot be made free.",
        slipstream="train.compile=true; a larger train.micro_batch",
        pytorch="torch.compile the model; take Python loops, hooks, logging and metric updates out "
        "of the step; use fused optimizers; a larger batch per step. Profile with with_stack=True "
        "to see the Python lines, and check that the process has a whole CPU core.",
    ),
    "host-synchronisation": Hint(
        title="the host waits for the device",
        meaning="A call on the host waits until the device is done. The queue runs empty, and the "
        "device then waits for the host to issue the next work.",
        computed="A replay of the trace in which the host goes on instead of waiting. Of high "
        "confidence if half of it is idle time inside the calls or from there to the next launch. "
        "Counted are "
        "cuda*Synchronize calls, blocking copies, and asynchronous copies to the host that return "
        "only when the copy is done, on threads that launch work.",
        slipstream=None,
        pytorch="Read values once per step or less often: no .item(), .tolist(), float(tensor), "
        "print(tensor), if tensor:, nonzero() or boolean indexing inside the step; keep metrics "
        "on the device and fetch them with non_blocking=True one step late; "
        'torch.cuda.set_sync_debug_mode("warn") prints every such call.',
    ),
    "data-loading": Hint(
        title="data loading",
        meaning="The step waits for its batch.",
        computed="A replay of the trace without the time in which a launching thread fetches a "
        "batch: DataLoader and load_batch ranges (Slipstream's trainer has one), frames of the "
        "DataLoader, and silence of more than 1 ms between the start of a step and its "
        "first operator (nothing of PyTorch runs for so long).",
        slipstream="slipstream prepare makes token shards that are read without work; "
        "data.prefetch sets how many steps are built ahead",
        pytorch="DataLoader(num_workers=..., prefetch_factor=..., persistent_workers=True, "
        "pin_memory=True); tokenise and decode once, before training; move slow storage away from "
        "the step.",
    ),
    "garbage-collection": Hint(
        title="garbage collection",
        meaning="Python's garbage collector runs inside the step.",
        computed="A replay of the trace without the collector's frames on launching threads.",
        slipstream=None,
        pytorch="gc.collect() and gc.freeze() before the loop, gc.disable() in it, and "
        "gc.collect() every few hundred steps on all ranks at once.",
    ),
    "allocator": Hint(
        title="memory allocation",
        meaning="Device memory is allocated or freed inside the step; these calls wait for the "
        "device.",
        computed="A replay of the trace without the cudaMalloc, cudaFree, cudaHostAlloc and cuMem* "
        "calls of launching threads.",
        slipstream=None,
        pytorch="No torch.cuda.empty_cache() in the loop; constant shapes; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; leave some memory free, since at the "
        "limit the allocator frees and allocates in every step.",
    ),
    "idle-unexplained": Hint(
        title="idle for unknown reasons",
        meaning="The device does nothing, and the trace does not show why.",
        computed="Idle time before work whose launch the trace lacks or had before the gap began; "
        "all idle time if the trace has no host operators or only a sample of them.",
        slipstream="slipstream diagnose --run RECIPE records the host as well",
        pytorch="Record the whole of a few steady steps: activities=[ProfilerActivity.CPU, "
        "ProfilerActivity.CUDA], schedule(wait=1, warmup=2, active=3), with_stack=True if the "
        "host seems busy; on several nodes the trace of every rank.",
    ),
    "memory-bound": Hint(
        title="memory-bound kernels below the memory rate",
        meaning="Kernels that are limited by memory traffic move fewer bytes per second than the "
        "device can.",
        computed="Bytes from the operators' shapes (inputs once, output once) at the device's "
        "published memory rate, against measured durations. Kernels under 10 us are left out: "
        "they are too short to reach the rate. Needs shapes and a known device.",
        slipstream="train.compile=true; ops.linear_cross_entropy in place of logits and their loss",
        pytorch="torch.compile, fused norms and activations (F.rms_norm, F.layer_norm), contiguous "
        "inputs (channels_last for convolutions), 16-bit activations.",
    ),
    "fusible-chains": Hint(
        title="chains of small memory-bound kernels",
        meaning="Pointwise and norm kernels follow each other and each reads and writes the whole "
        "tensor; one fused kernel would do it once.",
        computed="Runs of such kernels on one stream, of at least two operators whose largest "
        "inputs have equally many elements, with no other kernel or copy between them; kernels "
        "that a compiler made and those inside convolutions and the like are left out. The "
        "longest kernel stays, and a third of the others: of the three passes of a two-input "
        "kernel the second input has still to be read. Needs operator shapes.",
        slipstream="train.compile=true compiles each layer",
        pytorch="torch.compile the model or the function that holds the chain; AdamW(fused=True) "
        "for optimizer chains; F.rms_norm, F.scaled_dot_product_attention in place of their parts.",
    ),
    "recompute-cost": Hint(
        title="recomputed activations",
        meaning="Activation checkpointing runs forward work a second time inside backward.",
        computed="Compute kernels of the recompute phase: forward operators that run inside "
        "backward. All of it is at stake only where memory allows to keep everything.",
        slipstream=None,
        pytorch="Checkpoint fewer layers, or only what is cheap to compute again: "
        "torch.utils.checkpoint.create_selective_checkpoint_contexts, torch._functorch.config."
        "activation_memory_budget with torch.compile; spend freed memory first.",
    ),
    "tensor-cores-unused": Hint(
        title="matrix products without tensor cores",
        meaning="Matrix products run in fp32 on the ordinary units; tensor cores are several times "
        "as fast.",
        computed="Half the time of GEMM kernels whose names say that no tensor cores are used, on "
        "devices that have them: a cautious half, as rates differ by 8 to 16. Whether the model "
        "tolerates another number type is not in the trace, so confidence is low.",
        slipstream="train.dtype=bf16",
        pytorch='torch.autocast("cuda", dtype=torch.bfloat16), or '
        'torch.set_float32_matmul_precision("high") for TF32 on Ampere and later; sizes that are '
        "multiples of 8.",
    ),
    "gemm-slowed-by-communication": Hint(
        title="matrix products slowed by communication",
        meaning="Kernels take longer while a collective runs beside them: it takes multiprocessors "
        "and memory bandwidth. Part of what overlap hides is paid here.",
        computed="GEMM kernels of one name, grid and shape, at least half covered by communication "
        "against not covered at all; medians, and a rank test at 1 % so that noise is no finding. "
        "At least 5 kernels on each side.",
        slipstream="parallel.data.bucket_mb moves collectives to other places",
        pytorch="Fewer channels for NCCL (NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS), larger and later "
        "buckets, collectives beside work that is bound by neither.",
    ),
    "streams-competing": Hint(
        title="compute streams that compete",
        meaning="Kernels on two compute streams run at once and slow each other down.",
        computed="As for communication, with compute kernels of other streams in its place.",
        slipstream=None,
        pytorch="Put them on one stream, or run side by side only what leaves multiprocessors "
        "free; measure both ways.",
    ),
    "expert-imbalance": Hint(
        title="uneven experts",
        meaning="Some ranks or experts get more tokens than others; the others wait.",
        computed="Time of grouped matrix products and expert kernels per rank, largest less mean; "
        "with one rank the split sizes of all-to-alls, which give no milliseconds.",
        slipstream="model.moe.balance.threshold, model.moe.aux_loss or model.moe.expert_bias",
        pytorch="A balance loss or bias-based balancing in the router, a capacity factor, replicas "
        "of hot experts.",
    ),
    "warm-up-in-window": Hint(
        title="warm-up measured",
        meaning="The window contains steps that are not steady: compilation, autotuning, first "
        "allocations. Averages over it are too high.",
        computed="The larger of two: what the first step takes beyond the median of the others (of "
        "at least two), if that is more than half of the median and 1 ms; and a replay of the "
        "trace without the compilation and loading of kernels on launching threads.",
        slipstream="slipstream diagnose --run RECIPE warms up before it records",
        pytorch="torch.profiler.schedule(wait=5, warmup=3, active=3); call prof.step() every step; "
        "time only after compilation and autotuning are done.",
    ),
    "healthy": Hint(
        title="nothing wasted",
        meaning="The device is busy and nothing that the trace can show costs much.",
        computed="No finding is worth 5 % of the device's time after its confidence is counted "
        "(high 1, medium 1/2, low 1/4).",
        slipstream=None,
        pytorch="What is left is in the kernels: look at the largest ones.",
    ),
    "not-a-training-window": Hint(
        title="not a window of steady steps",
        meaning="The trace is of a start-up or of something that happens once, so no finding about "
        "throughput can be drawn from it.",
        computed="At most one step is marked, and one gap is at least half of the span, or "
        "allocation and kernel loading are.",
        slipstream="slipstream diagnose --run RECIPE",
        pytorch="Record steady steps: torch.profiler.schedule(wait=5, warmup=3, active=3) with "
        "prof.step() after each step.",
    ),
}


def reference() -> str:
    """The reference as Markdown, for docs/findings.md."""
    parts = []
    for name, hint in HINTS.items():
        parts.append(
            f"### `{name}`: {hint.title}\n\n{hint.meaning}\n\n"
            f"- **Computed**: {hint.computed}\n"
            f"- **Slipstream**: {hint.slipstream or 'no switch'}.\n"
            f"- **PyTorch**: {hint.pytorch}\n"
        )
    return "\n".join(parts)
