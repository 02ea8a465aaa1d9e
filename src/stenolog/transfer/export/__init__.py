"""Export of a session as a document for readers: Markdown or one HTML page."""
