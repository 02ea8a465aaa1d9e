"""Sessions as an agent loop holds them, and the care for them."""
