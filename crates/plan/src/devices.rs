//! Known devices and the peak rates that their vendors publish (dense, without sparsity).

/// A GPU model with its published peak rates, from which times are estimated.
#[derive(Debug, PartialEq)]
pub struct Device {
    /// Name of the GPU model in lower case, as the option `--device` takes it.
    pub name: &'static str,
    /// Peak bf16 rate, in floating-point operations per second.
    pub flops: f64,
    /// Peak memory bandwidth, in bytes per second.
    pub bandwidth: f64,
    /// Memory size, in bytes.
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
    /// Returns the device called `name`, ignoring ASCII case.
    ///
    /// # Errors
    /// Returns a message that lists the known devices if none has this name.
    pub fn by_name(name: &str) -> Result<&'static Device, String> {
        let found = ALL.iter().find(|device| device.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let names: Vec<&str> = ALL.iter().map(|device| device.name).collect();
            format!("--device is {name:?}, but must be one of {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_name_ignores_case_and_lists_devices() {
        assert_eq!(Device::by_name("H100").unwrap().memory, 80 << 30);
        assert!(Device::by_name("h1").unwrap_err().contains("must be one of a100, h100"));
    }
}
