"""Settings: the only code that reads environment and config file, and the frozen value it makes."""
