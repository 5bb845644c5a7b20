"""The rules that judge a run by its rows, by their subject."""
