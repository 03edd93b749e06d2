"""Units of sizes."""

GIB = 2**30
