//! Pictures of simulations: one or two panels side by side, 16 by 9, or more one below the other. The file is SVG or PNG; a PNG
//! uses a built-in font, so that it is the same on a machine without fonts. What is drawn is the subcommands'.

mod panel;

use anyhow::{Context, Result, anyhow};
use kuva::backend::raster::RasterBackend;
use kuva::backend::svg::SvgBackend;
use kuva::render::render::{Primitive, Scene, TextAnchor};
pub use panel::{Panel, PanelLine};
use std::path::PathBuf;
use std::str::FromStr;

const WIDTH: f64 = 1600.0;
const HEIGHT: f64 = 900.0;
const TITLE_HEIGHT: f64 = 80.0;
/// Height of each panel that has others below or above it, in pixels.
const ROW_HEIGHT: f64 = 340.0;

/// A file for a picture, in one of the two formats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PictureFile {
    path: PathBuf,
    kind: PictureKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PictureKind {
    Svg,
    Png,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a picture's name ends in .svg or .png, and {name:?} does not")]
pub struct BadPictureName {
    name: String,
}

impl FromStr for PictureFile {
    type Err = BadPictureName;

    fn from_str(name: &str) -> Result<Self, BadPictureName> {
        let path = PathBuf::from(name);
        let ending = path
            .extension()
            .and_then(|ending| ending.to_str())
            .unwrap_or_default();
        let kind = match ending.to_ascii_lowercase().as_str() {
            "svg" => PictureKind::Svg,
            "png" => PictureKind::Png,
            _ => return Err(BadPictureName { name: name.into() }),
        };
        Ok(Self { path, kind })
    }
}

impl PictureFile {
    /// Draws the picture and writes the file.
    pub fn write(&self, title: &str, panels: &[Panel]) -> Result<()> {
        let scene = scene(title, panels);
        let bytes = match self.kind {
            PictureKind::Svg => SvgBackend::default().render_scene(&scene).into_bytes(),
            PictureKind::Png => {
                let drawn = RasterBackend { scale: 1.0 }.render_scene(&scene);
                drawn.map_err(|why| anyhow!("the picture cannot be drawn: {why}"))?
            }
        };
        let unwritable = || {
            format!(
                "{} cannot be written; give --plot a place that can",
                self.path.display()
            )
        };
        std::fs::write(&self.path, bytes).with_context(unwritable)
    }
}

fn scene(title: &str, panels: &[Panel]) -> Scene {
    let is_in_rows = panels.len() > 2;
    let (width, height) = match is_in_rows {
        true => (WIDTH, ROW_HEIGHT),
        false => (WIDTH / panels.len().max(1) as f64, HEIGHT - TITLE_HEIGHT),
    };
    let rows = if is_in_rows { panels.len() } else { 1 };
    let mut scene = Scene::new(WIDTH, TITLE_HEIGHT + rows as f64 * height);
    scene.font_family = Some("DejaVu Sans, Verdana, sans-serif".into());
    scene.add(Primitive::Text {
        x: 40.0,
        y: 52.0,
        content: title.into(),
        size: 26,
        anchor: TextAnchor::Start,
        rotate: None,
        bold: true,
        color: None,
    });
    for (index, panel) in panels.iter().enumerate() {
        let drawn = panel.draw((width, height));
        let (x, y) = if is_in_rows {
            (0.0, index as f64 * height)
        } else {
            (index as f64 * width, 0.0)
        };
        let transform = Some(format!("translate({x},{})", TITLE_HEIGHT + y));
        scene.add(Primitive::GroupStart {
            transform,
            title: None,
            extra_attrs: None,
        });
        drawn
            .elements
            .into_iter()
            .for_each(|element| scene.add(element));
        scene.add(Primitive::GroupEnd);
        scene.defs.extend(drawn.defs);
    }
    scene
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panels() -> [Panel; 1] {
        let line = |name: &str, figure| PanelLine {
            name: name.into(),
            color: "#d55e00",
            is_highlighted: false,
            points: (0..=130)
                .map(|load| (f64::from(load), f64::from(load).min(figure)))
                .collect(),
        };
        let lines = vec![line("fgd", 92.0), line("stowage", 95.0)];
        [Panel {
            title: "allocated, %".into(),
            x_label: "asked".into(),
            x: (0.0, 130.0, 10.0),
            y_step: 5.0,
            lines,
        }]
    }

    #[test]
    fn both_kinds_are_drawn_and_each_line_is_named_at_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let written = |name: &str| {
            let path = directory.path().join(name);
            let file: PictureFile = path.to_str().unwrap().parse().unwrap();
            file.write("a <title>", &panels()).unwrap();
            std::fs::read(path).unwrap()
        };
        let svg = String::from_utf8(written("a.svg")).unwrap();
        for said in [
            "a &lt;title&gt;",
            "stowage 95.0",
            "fgd 92.0",
            "allocated, %",
        ] {
            assert!(svg.contains(said), "{said}");
        }
        assert!(written("a.PNG").starts_with(b"\x89PNG\r\n\x1a\n"));
    }

    #[test]
    fn another_ending_is_refused_with_those_that_exist() {
        for name in ["a.pdf", "a", ".svg", ""] {
            let error = name.parse::<PictureFile>().unwrap_err().to_string();
            assert!(error.contains("ends in .svg or .png"), "{error}");
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let file: PictureFile = "/nowhere/at/all.svg".parse().unwrap();
        let error = file.write("", &panels()).unwrap_err().to_string();
        assert!(
            error.starts_with("/nowhere/at/all.svg cannot be written"),
            "{error}"
        );
    }
}
