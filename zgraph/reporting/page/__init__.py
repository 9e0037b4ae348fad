"""`index.html`: the page of a report, which holds everything it shows; README.md says how it is built."""
