"""`index.html`: the self-contained page of a report; README.md explains how it is built."""
