"""Frames: sparse blocks to bytes and back."""
