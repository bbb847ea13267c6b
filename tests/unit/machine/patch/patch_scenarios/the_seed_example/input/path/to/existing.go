context line
unchanged
old line
rest
