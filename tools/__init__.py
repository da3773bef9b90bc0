"""Scripts that write documents from the code."""
