"""The configuration: JSON as HugeCTR's Hierarchical Parameter Server (HPS) has it, read with HPS's defaults.

Every key that HPS 24.06 or an earlier version knows is *honoured*, *without effect* or *refused*. A key without effect
sets nothing in jaxsok: it is checked, and `Config.without_effect` lists it. A key is refused if answers or the place of
rows would differ from what was asked for. Unknown keys are refused as well, with the nearest name; HPS ignores them.
"""

from jaxsok.serving.config.files import read, write
from jaxsok.serving.config.values import Config, ModelConfig, PersistentDb, TableConfig, UpdateSource, VolatileDb
from jaxsok.serving.errors import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "ModelConfig",
    "PersistentDb",
    "TableConfig",
    "UpdateSource",
    "VolatileDb",
    "read",
    "write",
]
