
def close(completions, answer, **columns):
    pairs = list(zip(completions, answer))
    return [0.5 * (c[-1:] == a[-1:]) + 0.5 * (c == a) for c, a in pairs]
