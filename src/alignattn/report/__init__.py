"""One self-contained page of HTML from result files, comparisons and diagnoses."""
