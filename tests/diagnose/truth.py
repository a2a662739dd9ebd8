"""Published figures of the traces in ``assets``, computed apart from this package, in ms and %.

Kernels are events of category ``kernel``; communication is what is named nccl or rccl. The span of
the kernels leaves copies out, ``span_with_copies`` does not.
"""

from typing import NamedTuple


class Truth(NamedTuple):
    kernels: float
    span: float
    busy: float
    busy_pct: float
    compute: float
    communication_kernels: float
    communication: float
    hidden: float
    overlap_pct: float | None
    exposed_communication: float
    copies: float
    busy_with_copies_pct: float
    short_pct: float
    steps: float
    span_with_copies: float
    exposed_copies: float
    idle: float
    idle_pct: float


# Columns in the order of the fields; the second table continues the rows of the first.
_FIRST = """
dlrm/worker0                 245    12.54   6.57  52.39   1.03  8   5.80   0.26  4.50   5.54   16
dlrm/worker1                 310    18.75  12.30  65.61   1.25  8  11.34   0.28  2.47  11.06   16
dlrm/worker2                 246    10.89   4.29  39.36   1.07  8   3.49   0.28  7.88   3.22   16
dlrm/worker3                 315    18.85  10.69  56.70   1.24  8   9.77   0.32  3.31   9.45   22
dlrm/worker4                 251    16.14   7.68  47.56   1.13  8   6.59   0.04  0.56   6.55   22
dlrm/worker5                 245    15.93   7.25  45.53   1.04  8   6.25   0.04  0.64   6.21   16
dlrm/worker6                 246    10.94   4.34  39.67   1.05  8   3.56   0.27  7.56   3.29   16
dlrm/worker7                 246    10.50   2.64  25.13   1.06  8   1.75   0.17  9.51   1.58   16
sampled_rank-0              1154  1222.82 547.30  44.76 210.32 10 396.20  59.22 14.95 336.98   50
sampled_rank-1              1104  1231.18 575.50  46.74 271.97 10 379.05  75.53 19.93 303.52   50
trace_diff_control          8568   463.44 369.26  79.68 281.34 60 163.54  75.61 46.24  87.92  882
trace_diff_test             9876   744.78 621.45  83.44 548.15 64 251.34 178.04 70.84  73.30 5756
nccl_data                   2700   660.55 155.22  23.50 115.66 21  46.88   7.32 15.61  39.56 1074
resnet_act_checkpoint_mi300 2995    86.57  81.36  93.99  25.74 17  71.52  15.89 22.22  55.63  658
bert_small_h100               60     3.91   0.31   7.86   0.31  0   0.00   0.00     -   0.00    1
torch_compile_triton          12    12.55  12.55 100.00  12.55  0   0.00   0.00     -   0.00    0
gpu_only_mi210               562     5.98   5.34  89.36   5.34  0   0.00   0.00     -   0.00    0
alexnet_cuda_sync             79 12840.24  10.63   0.08  10.63  0   0.00   0.00     -   0.00   19
"""
_REST = """
dlrm/worker0                 50.66 90.61 1    13.01  0.02     6.42 49.34
dlrm/worker1                 65.72 91.94 1    18.75  0.02     6.43 34.28
dlrm/worker2                 37.92 89.43 1    11.35  0.02     7.05 62.08
dlrm/worker3                 56.80 93.65 1    18.85  0.02     8.15 43.20
dlrm/worker4                 46.43 88.84 1    16.59  0.03     8.89 53.57
dlrm/worker5                 44.36 89.80 1    16.39  0.02     9.12 55.64
dlrm/worker6                 38.20 90.65 1    11.41  0.02     7.05 61.80
dlrm/worker7                 24.25 91.06 1    10.97  0.02     8.31 75.75
sampled_rank-0               44.79 32.84 2  1222.85  0.35   675.19 55.21
sampled_rank-1               47.11 35.14 2  1231.19  4.55   651.14 52.89
trace_diff_control           83.64 52.09 6   464.59 19.33    76.01 16.36
trace_diff_test              96.34 45.23 6   745.24 96.50    27.30  3.66
nccl_data                    23.84 42.93 3   660.55  2.28   503.05 76.16
resnet_act_checkpoint_mi300  97.04 78.50 3    86.57  2.64     2.57  2.96
bert_small_h100               7.92 96.67 1     3.91  0.00     3.60 92.08
torch_compile_triton        100.00  0.00 0    12.55  0.00     0.00  0.00
gpu_only_mi210               89.36 79.00 0     5.98  0.00     0.64 10.64
alexnet_cuda_sync             0.51 17.72 0 12920.24 55.51 12854.10 99.49
"""


def _table() -> dict[str, Truth]:
    rows = {}
    for first, second in zip(_FIRST.split("\n"), _REST.split("\n"), strict=True):
        cells = [*first.split(), *second.split()[1:]]
        if cells:
            numbers = [None if cell == "-" else float(cell) for cell in cells[1:]]
            rows[cells[0]] = Truth(*numbers)  # pyrefly: ignore
    return rows


TRUTH = _table()
"""By file name without its ending; ``dlrm/workerN`` is rank N of the archive."""

STRAGGLER = (
    ("all-to-all", 7624, 2, (7,), 10, 7635),
    ("all-to-all", 1101, 2, (7,), 8, 1108),
    ("all-to-all", 168, 1, (7,), 7, 176),
    ("all-to-all", 125, 2, (7,), 7, 133),
    ("all-reduce", 223, 5, (7,), 86, 307),
    ("all-to-all", 534, 3, (5,), 10, 545),
    ("all-reduce", 584, 5, (5,), 20, 602),
    ("all-reduce", 885, 7, (4,), 69, 952),
)
"""Collectives of the DLRM job in order: kind by the host's annotation (the kernels are send/recv),
start skew, end skew, last ranks, shortest and longest duration, us."""

WAITING_MS = (5.58, 11.13, 3.28, 9.57, 6.37, 6.04, 3.34, 1.53)
NCCL_MS = (5.80, 11.34, 3.49, 9.77, 6.59, 6.25, 3.56, 1.75)
FIRST_RANKS = ((1,), (4,), (0, 5, 6), (3, 5, 6), (1,), (1,), (3,), (0,))
