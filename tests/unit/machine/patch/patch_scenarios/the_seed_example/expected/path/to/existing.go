context line
unchanged
new line
rest
