"""Moving sessions: import from other programs, copies between stores, backups, export."""
