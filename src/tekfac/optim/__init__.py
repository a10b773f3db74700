"""The optimizer itself: its settings, param groups, state and update, and what it says in the log."""
