"""Files: the compact format and its loader, vanilla export, output folders that are never half-written."""
