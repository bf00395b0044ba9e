"""Files in and out: read, check, convert."""
