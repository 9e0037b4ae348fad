"""Context parallelism: the ranks of a mesh axis share each sequence, and exchange what attention needs."""
