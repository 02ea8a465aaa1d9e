"""Export of a session as JSON lines or Markdown, and the blocks that HTML pages show too."""
