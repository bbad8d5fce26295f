#!/usr/bin/env python3
"""Prints the table of kvc.h's section >>unicode from the Unicode Character Database.

    python3 tests/unicode_tables.py [UnicodeData.txt] > table.txt

Debian has the file in the package unicode-data. An entry is (first code point << 3 | class) and is
good up to the next entry. The entries below 0x80 are kept: the ASCII fast path is tested against
them. The last entry stands for bytes that are not UTF-8; they count as symbols, as U+FFFD does.
"""
import sys

PATH = sys.argv[1] if len(sys.argv) > 1 else '/usr/share/unicode/UnicodeData.txt'
CLASS = {'L': 1, 'M': 2, 'N': 3, 'P': 4, 'S': 5}    # by the first letter of the general category
END = 0x110000


def read_classes(path):
    classes = [0] * END
    first = None
    with open(path, encoding='ascii') as lines:
        for line in lines:
            field = line.split(';')
            code, name, category = int(field[0], 16), field[1], field[2]
            start = first if name.endswith(', Last>') else code
            first = code if name.endswith(', First>') else None
            for c in range(start, code + 1):
                classes[c] = CLASS.get(category[0], 0)
    return classes


def boundaries(classes):
    previous = None
    for code, kind in enumerate(classes + [CLASS['S']]):
        if kind != previous:
            yield code << 3 | kind
        previous = kind


def main():
    line = ''
    for entry in boundaries(read_classes(PATH)):
        item = f'{entry:#x},'
        if len(line) + len(item) > 96:
            print('    ' + line)
            line = ''
        line += item
    print('    ' + line.rstrip(','))


main()
