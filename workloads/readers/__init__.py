"""Trace readers, one file a format."""
