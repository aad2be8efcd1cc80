"""Batch: read history, clean, fit, calibrate, evaluate, register."""
