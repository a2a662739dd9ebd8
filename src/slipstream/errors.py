"""What a user can get wrong, as exceptions the command line prints in one line (exit code 2).

Every message names the field or file, the value found, what is allowed, and the fix.
"""


class SlipstreamError(Exception):
    """Base of every error raised on purpose; anything else that escapes is a bug of ours."""


class ConfigError(SlipstreamError):
    """A recipe, an override or an argument is wrong."""


class ShapeError(SlipstreamError, ValueError):
    """A tensor given to an op or module has the wrong shape, dtype or device."""


class DataError(SlipstreamError):
    """Source text or token shards are missing, empty, corrupt, or do not fit the model."""


class CheckpointError(SlipstreamError):
    """A checkpoint or model folder is missing, damaged, or belongs to another model."""


class HardwareError(SlipstreamError):
    """What was asked for cannot run on this device or with these versions."""


class TrainingError(SlipstreamError):
    """Training cannot go on: too many non-finite steps in a row, for example."""


class DependencyError(SlipstreamError):
    """An optional package is needed and not installed; the message says how to install it."""
