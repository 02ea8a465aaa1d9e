"""What outlives a conversation: notes, how they are made, and how they are found again."""
