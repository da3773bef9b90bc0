"""Speed, measured: ratios taken in one run, with interleaved repetitions."""
