"""The configuration: JSON as HugeCTR's Hierarchical Parameter Server (HPS) has it, read with HPS's defaults.

Every key that HPS 24.06 or a version before it knows is one of three. It is *honoured*: the field that it becomes says
what it does. Or it is *without effect*, because jaxsok has nothing that it could set: it is checked, and
`Config.without_effect` lists it where it was written. Or it is *refused*, because answers or the place of rows would
differ from what was asked for. A key that no HPS knew is refused as well, with the nearest name: HPS would ignore it in
silence.

Nothing here opens a table or a device.
"""

from jaxsok.serving.config.reader import read
from jaxsok.serving.config.values import (
    Config,
    ModelConfig,
    PersistentDatabase,
    TableConfig,
    Tier,
    UpdateSource,
    VolatileDatabase,
    WithoutEffect,
)
from jaxsok.serving.errors import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "ModelConfig",
    "PersistentDatabase",
    "TableConfig",
    "Tier",
    "UpdateSource",
    "VolatileDatabase",
    "WithoutEffect",
    "read",
]
