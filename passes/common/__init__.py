"""passes.common"""
