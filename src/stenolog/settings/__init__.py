"""Settings: the only reader of environment and config file, and the one frozen value it makes."""
