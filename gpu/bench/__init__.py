"""The kernel benchmark: what is measured, with which launches, beside whom, and what is made of the times.

Only `timing.py` needs a GPU. All else takes times as plain numbers, so it can be tested without one.
"""
