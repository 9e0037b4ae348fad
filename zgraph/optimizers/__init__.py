"""optimizers"""
