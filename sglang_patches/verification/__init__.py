"""A tree before and after the target's forward: its layout, the target's own draws, and the path they follow."""
