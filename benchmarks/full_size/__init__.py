"""A queue of experiments at the size of the papers, for minutes on a GPU.

    EDGEGOSSIP_DATA=FOLDER python -m benchmarks.full_size --minutes 9

`docs/performance.md` describes it.
"""
