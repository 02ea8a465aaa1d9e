"""Sessions that other programs kept: `old` the values, a module per layout, `folder` the files."""
