"""Settings: the only reader of environment and config file, and the one frozen value it makes."""

from stenolog.settings.file import config_path
from stenolog.settings.loading import InForce, load_settings, settings_in_force
from stenolog.settings.problems import Problem, WrongSettings
from stenolog.settings.values import (
    AgentSettings,
    ChannelSettings,
    CliSettings,
    ContextSettings,
    MemorySettings,
    ModelSettings,
    Settings,
)

__all__ = [
    "AgentSettings",
    "ChannelSettings",
    "CliSettings",
    "ContextSettings",
    "InForce",
    "MemorySettings",
    "ModelSettings",
    "Problem",
    "Settings",
    "WrongSettings",
    "config_path",
    "load_settings",
    "settings_in_force",
]
