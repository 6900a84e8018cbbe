"""Who may enter, how much, and what their browsers may do with the answers."""
