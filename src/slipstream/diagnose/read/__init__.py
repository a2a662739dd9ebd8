"""Profiles from files: PyTorch's Chrome traces (plain, gzip, tar) and Nsight Systems exports."""

from slipstream.diagnose.read.job import Progress, read
from slipstream.diagnose.read.limits import Limits

__all__ = ["Limits", "Progress", "read"]
