"""Who holds which block, and the arrays behind it."""
