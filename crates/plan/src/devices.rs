//! Devices, with the peaks that their makers publish (dense, without sparsity).

/// A device.
#[derive(Debug, PartialEq)]
pub struct Device {
    /// Name that `--device` takes.
    pub name: &'static str,
    /// Operations a second in bf16.
    pub flops: f64,
    /// Bytes a second from its memory.
    pub bandwidth: f64,
    /// Bytes of its memory.
    pub memory: u64,
}

const ALL: [Device; 6] = [
    Device { name: "a100", flops: 312e12, bandwidth: 2.04e12, memory: 80 << 30 },
    Device { name: "h100", flops: 989e12, bandwidth: 3.35e12, memory: 80 << 30 },
    Device { name: "h200", flops: 989e12, bandwidth: 4.8e12, memory: 141 << 30 },
    Device { name: "b200", flops: 2250e12, bandwidth: 8.0e12, memory: 180 << 30 },
    Device { name: "l40s", flops: 362e12, bandwidth: 0.864e12, memory: 48 << 30 },
    Device { name: "rtx4090", flops: 165e12, bandwidth: 1.008e12, memory: 24 << 30 },
];

impl Device {
    /// The device of this name.
    ///
    /// # Errors
    /// When there is none: which there are.
    pub fn named(name: &str) -> Result<&'static Device, String> {
        let found = ALL.iter().find(|device| device.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let names: Vec<&str> = ALL.iter().map(|device| device.name).collect();
            format!("--device {name:?} is not known; known are {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        assert_eq!(Device::named("H100").unwrap().memory, 80 << 30);
        assert!(Device::named("h1").unwrap_err().contains("known are a100, h100"));
    }
}
