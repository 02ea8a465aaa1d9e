"""A session as a document to read or to share: what is in it, as Markdown, as one HTML page."""
