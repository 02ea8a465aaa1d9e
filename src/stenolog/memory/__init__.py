"""Long-term memory: notes made from conversations, and the recall of notes and past messages."""
