#!/usr/bin/env python3
"""As much of the command `helm` as the pages and tests use, over the Python wheel `helm-python-sdk`, which has Helm's own library
in it: for machines on which package registries are at hand and Helm's releases are not."""

import argparse
import os
import sys
from pathlib import Path

import helm_python as helm


def merged(base, over):
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def values_of(arguments):
    values = {}
    for file in arguments.values:
        values = merged(values, helm.values_from_yaml(Path(file).read_text()))
    for text in arguments.set:
        values = merged(values, helm.parse_set_string(text))
    return values


def template(arguments):
    chart = helm.Chart.load(arguments.chart)
    rendered = chart.render(values_of(arguments), name=arguments.name, namespace=arguments.namespace, is_install=True)
    for source, text in sorted(rendered.items()):
        if source.endswith(".yaml") and text.strip():
            print(f"---\n# Source: {source}\n{text}")


def upgrade(arguments):
    config = helm.Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=arguments.namespace)
    chart, values = helm.Chart.load(arguments.chart), values_of(arguments)
    known = {release["name"] for release in config.list()}
    act = config.upgrade if arguments.name in known else config.install
    act(chart, arguments.name, values, namespace=arguments.namespace)
    print(f'Release "{arguments.name}" is there.')


def main():
    parser = argparse.ArgumentParser(prog="helm")
    commands = parser.add_subparsers(required=True)
    for name, command in (("template", template), ("upgrade", upgrade)):
        one = commands.add_parser(name)
        one.add_argument("name")
        one.add_argument("chart")
        one.add_argument("--namespace", default="default")
        one.add_argument("-f", "--values", action="append", default=[])
        one.add_argument("--set", action="append", default=[])
        if name == "upgrade":
            one.add_argument("--install", action="store_true", required=True)
        one.set_defaults(command=command)
    arguments = parser.parse_args()
    try:
        arguments.command(arguments)
    except helm.HelmError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
